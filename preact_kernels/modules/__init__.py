"""The modules: they hold parameters and hand them to the ops."""
