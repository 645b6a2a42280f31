"""Everything that touches verl, one seam a file."""
