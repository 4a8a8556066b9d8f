"""Planting bugs to see that the suite catches them: by hand, and by changing the source."""
