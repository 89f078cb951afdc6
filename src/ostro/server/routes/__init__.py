"""The endpoints, one file a family. Each file makes a router from an Api; none knows another."""
