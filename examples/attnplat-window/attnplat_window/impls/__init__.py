"""Code that runs. Imported when the backend has been chosen, and not before."""
