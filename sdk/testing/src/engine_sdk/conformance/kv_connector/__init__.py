"""The suite of point `kv_connector`."""
