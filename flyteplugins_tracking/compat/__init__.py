"""The public names of other plugins, implemented with this library: one module for each tracker."""
