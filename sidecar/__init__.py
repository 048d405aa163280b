"""A2A sidecar: a local daemon that reaches remote A2A agents over whichever interface is really served.

The package, from the top: ``cli`` and ``daemon`` wire everything; ``forwarder`` moves one call;
``agent`` keeps what is known of one agent; ``upstream`` carries out one attempt; ``listener``
accepts the application's calls; ``wire`` is sockets without A2A; ``core`` is A2A without sockets.
"""

__version__ = "0.1.0"
