# a comment \
rm -rf /tmp/x