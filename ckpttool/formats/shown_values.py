"""Values as a person reads them: the records of instances as text, a config of OmegaConf as what it configures."""

from __future__ import annotations

from typing import Any

from .pickles import BackReference, Global, Opaque
from .stored_tensors import Inline

__all__ = ["list_instance_classes", "to_readable"]


def to_readable(x: Any) -> object:
    """Convert a value from a pickle to plain data for people; plain data is returned unchanged.

    An instance becomes text. A node of an OmegaConf config, which also holds flags, types and its parent, becomes its
    content.
    """
    if isinstance(x, Opaque):
        if x.cls.module.partition(".")[0] == "omegaconf" and isinstance(x.state, dict):
            return to_readable(x.state.get("_content", x.state.get("_val")))
        return _Text(_format_as_call(x))
    if isinstance(x, Global):
        return _Text(str(x))
    if isinstance(x, BackReference):
        return _Text("...")
    if isinstance(x, Inline):
        return _Text(f"<{x.dtype} tensor {list(x.shape)}>")
    if isinstance(x, dict):
        return {to_readable(k): to_readable(v) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(to_readable(v) for v in x)
    return x


def list_instance_classes(x: Any) -> dict[Global, None]:
    """Return the classes of the outermost instances in a value, in order, as keys of a dict with values None. Arrays
    and numbers of numpy, and instances of torch's own classes (devices, sizes), are left out."""
    if isinstance(x, Opaque):
        return {} if x.cls.module.partition(".")[0] == "numpy" or x.cls.module == "torch" else {x.cls: None}
    inside = x.values() if isinstance(x, dict) else x if type(x) in (list, tuple) else ()
    return {cls: None for v in inside for cls in list_instance_classes(v)}


class _Text(str):
    """Text that is shown without quotation marks."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the text itself, without quotation marks."""
        return str(self)


def _format_as_call(x: Opaque) -> str:
    """Return a text that shows an instance as a call that would make it: homemod.Mode(2),
    argparse.Namespace(lr=0.1)."""
    cls, args, state = str(x.cls), x.args, x.state
    if cls == "functools.partial" and isinstance(state, tuple) and len(state) == 4 and isinstance(state[1], tuple):
        args, state = (state[0], *state[1]), state[2]
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # of a class with slots
        state = {**(state[0] or {}), **state[1]} if isinstance(state[0] or {}, dict) else state
    parts = [repr(to_readable(a)) for a in args]
    if isinstance(state, dict):
        parts += [f"{k}={to_readable(v)!r}" for k, v in state.items()]
    elif state is not None:
        parts.append(repr(to_readable(state)))
    parts += [repr(to_readable(v)) for v in x.list_items]
    parts += [f"{to_readable(k)!r}: {to_readable(v)!r}" for k, v in x.dict_items]
    return f"{cls}({', '.join(parts)})"
