"""The goodput model, torch-free: throughput, statistical efficiency, the fit and the best batch size."""
