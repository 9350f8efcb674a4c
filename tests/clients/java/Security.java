import com.fasterxml.jackson.databind.JsonNode;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.Set;
import javax.security.auth.callback.Callback;
import javax.security.auth.callback.UnsupportedCallbackException;
import javax.security.auth.login.AppConfigurationEntry;
import org.apache.kafka.common.security.auth.AuthenticateCallbackHandler;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerToken;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerTokenCallback;

/** What proves to a broker who this client is, and to the client who the broker is. */
final class Security {
    private static final String MODULES = "org.apache.kafka.common.security.";

    private Security() {
    }

    static void of(JsonNode asked, Map<String, Object> config) throws Exception {
        String mechanism = KafkaDriver.text(asked, "mechanism");
        String ca = KafkaDriver.text(asked, "ca");
        String password = KafkaDriver.text(asked, "password");
        config.put("security.protocol", (mechanism.isEmpty() ? "" : "SASL_") + (ca.isEmpty() ? "PLAINTEXT" : "SSL"));
        if (!ca.isEmpty()) {
            config.put("ssl.truststore.type", "PEM");
            config.put("ssl.truststore.location", ca);
        }
        if (!KafkaDriver.text(asked, "certificate").isEmpty()) {
            config.put("ssl.keystore.type", "PEM");
            config.put("ssl.keystore.certificate.chain", Files.readString(Path.of(KafkaDriver.text(asked, "certificate"))));
            config.put("ssl.keystore.key", Files.readString(Path.of(KafkaDriver.text(asked, "key"))));
        }
        if (mechanism.isEmpty()) {
            return;
        }
        config.put("sasl.mechanism", mechanism);
        if (mechanism.equals("OAUTHBEARER")) {
            Token.value = password;
            config.put("sasl.login.callback.handler.class", Token.class.getName());
            config.put("sasl.jaas.config", MODULES + "oauthbearer.OAuthBearerLoginModule required;");
        } else {
            String module = mechanism.equals("PLAIN") ? "plain.PlainLoginModule" : "scram.ScramLoginModule";
            config.put("sasl.jaas.config", MODULES + module + " required username=\"" + KafkaDriver.text(asked, "user")
                + "\" password=\"" + password + "\";");
        }
    }

    /** Gives out the token that it was given; nobody's identity provider is asked. */
    public static final class Token implements AuthenticateCallbackHandler, OAuthBearerToken {
        static volatile String value = "";

        @Override
        public void configure(Map<String, ?> configs, String mechanism, List<AppConfigurationEntry> entries) {
        }

        @Override
        public void handle(Callback[] callbacks) throws UnsupportedCallbackException {
            for (Callback callback : callbacks) {
                if (!(callback instanceof OAuthBearerTokenCallback)) {
                    throw new UnsupportedCallbackException(callback);
                }
                ((OAuthBearerTokenCallback) callback).token(this);
            }
        }

        @Override
        public void close() {
        }

        @Override
        public String value() {
            return value;
        }

        @Override
        public Set<String> scope() {
            return Set.of();
        }

        @Override
        public long lifetimeMs() {
            return System.currentTimeMillis() + 3_600_000;
        }

        @Override
        public String principalName() {
            return "alice";
        }

        @Override
        public Long startTimeMs() {
            return null;
        }
    }
}
