"""The pre-conditioned gradient noise scale (PGNS)."""


class NoiseScale:
    """Smoothed PGNS: ``noise_scale`` is phi in samples, None while unknown."""
