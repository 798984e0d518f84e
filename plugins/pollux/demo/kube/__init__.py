"""The demo on Kubernetes: the same jobs, summary and checks; the chart installs what they need."""

from pollux.demo.kube.site import KubeChoice, kube_site

__all__ = ["KubeChoice", "kube_site"]
