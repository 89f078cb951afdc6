"""Measurements of servers and models, from outside: `bench` loads a server, `compare` puts two side by side, `report`
shows figures as tables and pages.
"""
