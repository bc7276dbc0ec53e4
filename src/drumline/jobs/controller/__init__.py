"""The reconcile loop of the server: observe, decide, save, act."""
