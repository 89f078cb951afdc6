"""The page at `/` of `ostro serve --ui`: its files, who serves them, who opens them. Knows no model and no endpoint.

What lies in `static/` is plain HTML, CSS and ES modules, served as it is. The page calls the API as any client does.
"""
