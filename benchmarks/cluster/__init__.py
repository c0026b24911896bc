"""What a cluster costs, beside a job engine that publishes job by job, and beside a bare loop over rows."""
