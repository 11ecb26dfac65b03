"""Makes DFlash drafters for a target: chats of its own, the fit, the evaluation, the export."""
