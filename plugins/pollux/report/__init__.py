"""``pollux report``: what the policies do with recorded workloads, as a page with figures."""
