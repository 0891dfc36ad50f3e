"""`engine plugins new`: a package that installs, registers and passes its suite as it is."""
