"""A small Django app: system checks, and the relay as a management command. INSTALLED_APPS = [..., "outbox.django"]."""
