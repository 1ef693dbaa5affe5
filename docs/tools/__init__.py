"""Tools of the documentation: they run its code, draw its pictures, and build it as a site."""
