"""A2A sidecar: a local daemon that reaches remote A2A agents over whichever interface is really served.

The package, from the top: ``cli`` and ``daemon`` wire everything; ``forwarder`` moves one call;
``agent`` keeps what is known of one agent; ``upstream`` carries out one attempt; ``listener``
accepts the application's calls; ``wire`` is sockets without A2A; ``core`` is A2A without sockets.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidecar.check import (
        AgentCardBindingError,
        BindingProbeError,
        probe_bindings,
        validate_card_against_bindings,
    )

__all__ = [
    "AgentCardBindingError",
    "BindingProbeError",
    "probe_bindings",
    "validate_card_against_bindings",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    # For an agent's own start-up; most of the package does without.
    if name in __all__:
        return getattr(import_module("sidecar.check"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
