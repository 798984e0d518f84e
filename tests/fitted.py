"""A fit that passes for measured, for tests of what is computed from one and of what is handed on."""

from pollux_agent.model.throughput import ThroughputParams

FIT = ThroughputParams(
    alpha_grad=0.05,
    beta_grad=0.001,
    alpha_sync_local=0.02,
    beta_sync_local=0.001,
    alpha_sync_node=0.1,
    beta_sync_node=0.002,
    gamma=1.5,
)
