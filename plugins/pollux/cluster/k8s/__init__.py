"""The cluster on Kubernetes: jobs are driver pods, allocations annotations, GPUs what nodes have left."""

from pollux.cluster.k8s.cluster import KubeCluster
from pollux.cluster.k8s.settings import KubeSettings, kube_settings

__all__ = ["KubeCluster", "KubeSettings", "kube_settings"]
