"""The public names of other plugins, on top of this library's own: one module for each tracker."""
