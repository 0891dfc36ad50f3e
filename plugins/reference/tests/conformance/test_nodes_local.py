"""The driver of this machine through the suite of point `nodes`."""

from engine_sdk.conformance import NodesConformance


class TestLocal(NodesConformance):
    driver = "local"
