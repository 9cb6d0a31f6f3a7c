"""What ranks print, kept in files of the run's folder."""
