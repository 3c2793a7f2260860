"""What ``engine.explain()`` shows: how the model was captured, rewritten, compiled and checked."""

from __future__ import annotations

from dataclasses import dataclass

from tabulate import tabulate

from chunkc.check import Verification
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.prepared import Prepared


@dataclass(frozen=True)
class CompileReport:
    """How a model became an engine. ``str()`` gives the text that ``engine.explain()`` returns.

    Attributes:
        prepared: what capture, passes and lowering found.
        source: where that comes from, "the model" or "the cache".
        prepare_seconds: time to get it.
        mode: "compiled" or "eager".
        body: which body of the attention op runs, "cpp" or "reference".
        verification: what the check found, or None where it was switched off.
        verify_seconds: time it took.
        cache: the key/value cache's size, in words.
        detour: why a folder was not started from without its model, where that could not be.
    """

    prepared: Prepared
    source: str
    prepare_seconds: float
    mode: str
    body: str
    verification: Verification | None
    verify_seconds: float
    cache: str
    detour: str | None = None

    @property
    def layers(self) -> tuple[AttentionLayer, ...]:
        """The model's attention calls, in graph order."""
        return self.prepared.layers

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", self._passes(), "", *self._notes()]).rstrip()

    def _head(self) -> list[str]:
        prepared = self.prepared
        route = "through the attention interface" if prepared.route == "interface" else "as it stands"
        lines = [f"prepared from {self.source} in {self.prepare_seconds:.1f} s"]
        if self.detour is not None:
            lines.append(f"  not from the folder alone: {self.detour}")
        lines.append(f"captured {route} in {prepared.capture_seconds:.1f} s{self._earlier()}")
        lines += [f"  not captured by {refused}" for refused in prepared.refused]
        shapes = {layer.shape for layer in self.layers}
        lines.append(f"{len(self.layers)} attention calls of {len(shapes)} kind{'s' if len(shapes) != 1 else ''}:")
        lines += [f"  {shape}" for shape in sorted(shapes, key=str)]
        program = prepared.program
        lines.append(
            f"{len(program.parts)} parts of {program.num_kinds} kinds, mode {self.mode!r}; attention runs in the "
            f"{self.body} body"
        )
        if program.head is not None:
            lines.append("logits are computed where they are wanted; of greedy requests the best token alone")
        if self.verification is None:
            lines.append("not checked against the model (verify='off')")
        else:
            found = self.verification
            most = "" if found.rows_within == 1 else f" for {found.rows_within:.0%} of them"
            lines.append(
                f"checked against {found.against} in {self.verify_seconds:.1f} s: {found.rows} rows of logits, worst "
                f"error {found.worst:.1e} of their spread ({found.tolerance:.1e} allowed{most})"
            )
        lines.append(self.cache)
        return lines

    def _earlier(self) -> str:
        return "" if self.source == "the model" else ", at an earlier start, as were the passes below"

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
            for record in self.prepared.records
        ]
        return tabulate(rows, ["pass", "matches", "nodes before", "nodes after", "ms", "ms to check"])

    def _notes(self) -> list[str]:
        lines = []
        for record in self.prepared.records:
            lines += [f"{record.name}: {note}" for note in record.report.notes]
            lines += [f"{record.name}: left {skipped.what} alone: {skipped.why}" for skipped in record.report.skipped]
        return lines
