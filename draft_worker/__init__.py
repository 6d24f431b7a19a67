"""The draft worker: DFlash and DFlash2 drafts for all requests at once, from paged context in the shared arena."""
