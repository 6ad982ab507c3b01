"""Lets ``torch.load`` follow pointers in programs that never import Portus.

``register`` runs at the end of ``import torch``, by the entry point in ``portus_in_torch``. So it
imports nothing: what it loads, every program on the machine pays for (under 2 ms on 2 cores).
"""

from __future__ import annotations


def this_is_a_pointer_run_portus_export(text: str) -> object:
    """What ``torch.load`` calls for a pointer; ``text`` is the string in it.

    Named so that a machine without Portus prints what to do. Returns the verified state, on the
    CPU or, for ``map_location="meta"``, without memory. Raises ``PortusError``.
    """
    from portus.reach.pools.resolve import load_text

    return load_text(text)


# torch knows an allowed global by these two names, and so does pickle: portus offers it.
this_is_a_pointer_run_portus_export.__module__ = "portus"
this_is_a_pointer_run_portus_export.__qualname__ = "this_is_a_pointer_run_portus_export"


def register() -> None:
    """Allow the one global of pointers for ``torch.load``. Any number of calls is one."""
    try:
        from torch.serialization import add_safe_globals

        add_safe_globals([this_is_a_pointer_run_portus_export])
    except ImportError:  # torch is older, or not whole: its load then says what it does not know
        return


register_reference_loader = register
