"""Everything that listens: the HTTP server, the gateway, the cluster, the metrics terminal."""
