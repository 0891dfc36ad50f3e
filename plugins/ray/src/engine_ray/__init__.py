"""Engine on a Ray cluster: drivers `ray` of points nodes and executor."""
