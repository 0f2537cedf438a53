cat <<EOF > .env
x
EOF