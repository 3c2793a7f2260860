"""The errors chunkc raises for its users. A leaf module: anything may import it, it imports nothing of ours."""

from __future__ import annotations


class ChunkcError(Exception):
    """Base class of every error that chunkc raises on purpose."""


class UnsupportedModelError(ChunkcError):
    """The model cannot be compiled right, so it is not compiled at all.

    Attributes:
        reason: what is not understood, in one sentence.
        op: the operator concerned (``aten.conv1d.default``), or None where it is not about one operator.
        module: path of the module that the operator came from (``model.layers.0.conv``), or None.
        hint: what the user can do about it.
    """

    def __init__(
        self,
        reason: str,
        *,
        op: str | None = None,
        module: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.reason, self.op, self.module, self.hint = reason, op, module, hint
        where = ""
        if op or module:
            where = f" [op {op or 'unknown'} in module {module or '(root)'}]"
        super().__init__(f"{reason}{where}{'. ' + hint if hint else ''}")


class InvalidRequestError(ChunkcError, ValueError):
    """One request is not valid. Only that request fails; everything else in flight goes on.

    Attributes:
        request_id: the request's id where it had one.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        self.request_id = request_id
        super().__init__(message)


class CapacityError(ChunkcError):
    """The key/value cache or another fixed resource is too small for what was asked of it."""


class PassError(ChunkcError):
    """A pass, or the order of the passes, is wrong: a fact that does not hold, a cycle, a pass that never matches.

    Attributes:
        pass_name: the pass concerned, or None where it is about the order of several.
    """

    def __init__(self, message: str, *, pass_name: str | None = None) -> None:
        self.pass_name = pass_name
        super().__init__(f"pass {pass_name!r}: {message}" if pass_name else message)


class VerificationError(UnsupportedModelError):
    """The compiled graph's logits are not those of the untouched model, so no engine is handed out."""
