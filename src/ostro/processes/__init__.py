"""Subprocesses: starting one with a socket pair, the environment it gets, and relaying its log."""
