"""Random lives of engines, checked against requests that run alone."""
