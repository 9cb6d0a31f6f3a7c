"""Where alerts are sent: one small file for each kind."""
