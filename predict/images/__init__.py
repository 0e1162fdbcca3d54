"""Pictures: from a file's bytes to the pixels that a tower reads. Imports Pillow with the first."""
