"""The registration that lets ``torch.load`` follow pointers without an import of Portus.

``register`` runs at the end of ``import torch``, by the entry point in ``portus_in_torch``. So it
imports nothing: every program on the machine pays for its time (under 2 ms on 2 cores).
"""

from __future__ import annotations


def this_is_a_pointer_run_portus_export(text: str) -> object:
    """Return the state of a pointer; ``torch.load`` calls this with ``text``, the string in it.

    The name tells the user of a machine without Portus what to do. The state is verified, on the
    CPU or, for ``map_location="meta"``, without memory. Raises ``PortusError``.
    """
    from portus.reach.pools.resolve import load_text

    return load_text(text)


# torch knows an allowed global by these two names, and so does pickle: portus offers it.
this_is_a_pointer_run_portus_export.__module__ = "portus"
this_is_a_pointer_run_portus_export.__qualname__ = "this_is_a_pointer_run_portus_export"


def register() -> None:
    """Allow the one global of pointers for ``torch.load``. May be called again."""
    try:
        from torch.serialization import add_safe_globals

        add_safe_globals([this_is_a_pointer_run_portus_export])
    except ImportError:  # torch is older, or incomplete: its load then names the unknown global
        return


register_reference_loader = register
