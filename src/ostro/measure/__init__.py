"""Measures servers and models from outside: `bench` puts load on a server, `compare` compares two, `report` renders
results as tables and pages.
"""
