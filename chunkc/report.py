"""What ``engine.explain()`` shows: how the model was captured, rewritten, compiled and checked."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from chunkc.check import Verification
from chunkc.passes.page_attention import AttentionLayer
from chunkc.passes.pipeline import PassRecord


@dataclass(frozen=True)
class CompileReport:
    """How a model became an engine. ``str()`` gives the text that ``engine.explain()`` returns.

    Attributes:
        route, refused, capture_seconds, records, layers: see ``Rewritten`` and ``PassContext``.
        mode: "compiled" or "eager".
        body: which body of the attention op runs, "cpp" or "reference".
        lower_seconds: time to compile.
        verification: what the check found, or None where it was switched off.
        verify_seconds: time it took.
        cache: the key/value cache's size, in words.
    """

    route: str
    refused: tuple[str, ...]
    capture_seconds: float
    records: tuple[PassRecord, ...]
    layers: tuple[AttentionLayer, ...]
    mode: str
    body: str
    lower_seconds: float
    verification: Verification | None
    verify_seconds: float
    cache: str

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", self._passes(), "", *self._notes()]).rstrip()

    def _head(self) -> list[str]:
        route = "through the attention interface" if self.route == "interface" else "as it stands"
        lines = [f"captured {route} in {self.capture_seconds:.1f} s"]
        lines += [f"  not captured by {refused}" for refused in self.refused]
        shapes = {layer.shape for layer in self.layers}
        lines.append(f"{len(self.layers)} attention calls of {len(shapes)} kind{'s' if len(shapes) != 1 else ''}:")
        lines += [f"  {shape}" for shape in sorted(shapes, key=str)]
        lines.append(
            f"lowered, mode {self.mode!r}, in {self.lower_seconds:.1f} s; attention runs in the {self.body} body"
        )
        if self.verification is None:
            lines.append("not checked against the model (verify='off')")
        else:
            found = self.verification
            lines.append(
                f"checked against the model in {self.verify_seconds:.1f} s: {found.rows} rows of logits, worst error "
                f"{found.worst:.1e} of their spread ({found.tolerance:.0e} allowed)"
            )
        lines.append(self.cache)
        return lines

    def _passes(self) -> str:
        rows = [
            (
                record.name,
                record.report.matches,
                record.nodes_before,
                record.nodes_after,
                f"{record.seconds * 1e3:.0f}",
                f"{record.check_seconds * 1e3:.0f}",
            )
            for record in self.records
        ]
        return tabulate(rows, ["pass", "matches", "nodes before", "nodes after", "ms", "ms to check"])

    def _notes(self) -> list[str]:
        lines = []
        for record in self.records:
            lines += [f"{record.name}: {note}" for note in record.report.notes]
            lines += [f"{record.name}: left {skipped.what} alone: {skipped.why}" for skipped in record.report.skipped]
        return lines
