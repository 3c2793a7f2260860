"""Requests, pages, scheduler, batch packing, sampling and the engine."""
