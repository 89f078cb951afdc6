"""Ostro on a Ray cluster: `application.build` for Ray Serve, `data.OstroPredictor` for Ray Data.

Needs the extra `ray`. Nothing else of the package imports this.
"""
