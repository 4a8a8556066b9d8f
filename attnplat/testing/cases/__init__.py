"""The cases by their ids."""
