"""The benchmark command: ``python -m chunkc.bench``."""
