"""The endpoints, one file per group. Each file builds a router from an Api; none knows another."""
