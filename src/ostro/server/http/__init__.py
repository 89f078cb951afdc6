"""HTTP on the wire: connections, the protocol, bodies, event streams, disconnects. Knows no routes."""
