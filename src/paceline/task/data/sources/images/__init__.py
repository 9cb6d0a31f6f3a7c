"""Images as samples: a folder for each class, or tar files of them."""
