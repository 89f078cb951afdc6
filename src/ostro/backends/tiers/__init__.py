"""Tiers below a runner's pages: host memory, disk, and bundles that engines share."""
