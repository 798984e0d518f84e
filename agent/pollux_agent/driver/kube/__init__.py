"""The driver on Kubernetes: a small pod of our own code that turns its annotations into worker pods.

Needs the extra ``kubernetes`` of this distribution. :mod:`api` is the one way to the API server, used by the
scheduler's side as well; :mod:`documents` names the labels and annotations that both sides share.
"""
