"""What a function's code does, as a digest that is the same in every process of one Python. A leaf module."""

from __future__ import annotations

import hashlib
import types


def digest(code: types.CodeType) -> str:
    """Of the instructions, the names they use and the constants; not of where the code stands."""
    found = hashlib.sha256()
    _add(code, found)
    return found.hexdigest()


def _add(code: types.CodeType, found: hashlib._Hash) -> None:
    found.update(code.co_code)
    plain = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _add(constant, found)
        else:  # the order of a set is another in every process
            plain.append(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    found.update(repr((names, code.co_argcount, code.co_kwonlyargcount, code.co_flags, plain)).encode())
