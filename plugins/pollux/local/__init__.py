"""The local cluster: a service that owns drivers and workers as processes of this machine."""
