"""What a run says about itself: the live console, logs and trackers, versions, and the report."""
