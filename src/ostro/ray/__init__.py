"""Ostro on a Ray cluster: `application.build` for Ray Serve, `data.OstroPredictor` for Ray Data.

Requires the extra `ray`. No other package imports this one.
"""
