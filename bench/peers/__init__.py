"""The old packages, each as its authors ship it: a module with a `Peer` and its `CASES`."""
